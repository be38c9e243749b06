"""What `config.json` says of a model, and for Megatron which rank holds which box of which Hugging Face parameter.

Pure functions of `config.json` and a rank's coordinates; nothing imports torch.
"""
