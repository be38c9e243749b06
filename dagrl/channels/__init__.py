"""Channels: how tensors go from worker to worker outside the object store."""

from dagrl.channels.base import Channel, ChannelSpec, Pending, open_channel

__all__ = ["Channel", "ChannelSpec", "Pending", "open_channel"]
