"""The calls of a process group between two ranks: send and receive."""

from __future__ import annotations

from mpitrain.torch.bare_group import BareGroup, Tensors
from mpitrain.torch.flat_tensors import raw
from mpitrain.torch.uncompiled import uncompiled
from mpitrain.torch.work import Call


@uncompiled
class PairCalls(BareGroup):
    """The calls between two ranks. torch calls these methods."""

    def send(self, tensors: Tensors, to: int, tag: int = 0) -> Call:
        """See torch."""
        tensor = self._peer("send", tensors, to, tag)
        call = self._call(f"send to {self._world.name(to)}", [tensor], None)
        return self._noted(self._channel.send(call, raw(call.buffers.read(tensor)), to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Call:
        """See torch."""
        tensor = self._peer("recv", tensors, source, tag)
        call = self._call(f"recv from {self._world.name(source)}", [tensor], None)
        return self._noted(self._channel.receive(call, raw(call.buffers.write(tensor)), source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Call:
        """See torch."""
        tensor = self._peer("recv", tensors, 0, tag)
        call = self._call("recv from any rank", [tensor], None)
        return self._noted(self._channel.receive(call, raw(call.buffers.write(tensor)), None, tag))
