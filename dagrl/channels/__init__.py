"""Channels: move tensors between workers outside Ray's object store."""

from dagrl.channels.base import Channel, ChannelSpec, PendingMessage
from dagrl.channels.open import open_channel

__all__ = ["Channel", "ChannelSpec", "PendingMessage", "open_channel"]
