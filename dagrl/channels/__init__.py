"""Channels: move tensors between workers outside Ray's object store."""

from dagrl.channels.base import Channel as Channel
from dagrl.channels.spec import ChannelSpec as ChannelSpec


def open_channel(spec: ChannelSpec) -> Channel:
    """Opens this rank's end of the channel that `spec` describes; returns when all ranks have opened theirs.

    Raises ChannelError if a rank does not join within the deadline, MissingDependencyError if the backend's package is not
    installed.
    """
    if spec.kind == "gloo":
        from dagrl.channels.gloo import GlooChannel

        return GlooChannel(spec)
    if spec.kind == "nccl":
        from dagrl.channels.nccl import NcclChannel

        return NcclChannel(spec)
    from dagrl.channels.ipc import IpcChannel

    return IpcChannel(spec)
