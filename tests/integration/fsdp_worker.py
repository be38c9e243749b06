"""FsdpWorker for tests, which also reports gradients. Runs in the processes of `MegatronPool`."""

from typing import Any

from dagrl.refit.slices import Box
from dagrl.workers.fsdp import FsdpTeacherWorker, FsdpValueWorker, FsdpWorker


class TestedWorker(FsdpWorker):
    """Adds methods for tests. Tensors are returned as numpy arrays over pipes."""

    __test__ = False

    def gradients(self) -> list[tuple[str, Box, Any]]:
        """Returns name, box and values of this rank's gradients after the last step."""
        return self._boxes(lambda parameter: parameter.grad)

    def weights(self) -> list[tuple[str, Box, Any]]:
        return self._boxes(lambda parameter: parameter)

    def sent(self) -> dict[str, Any]:
        backend = self.backend()
        with backend.sending():
            return {name: tensor.float().cpu().numpy() for name, tensor in backend.sent_tensors().items()}

    def resident_bytes(self) -> dict[str, int]:
        """Returns the bytes of each part of the train state on the worker's device."""
        from dagrl.workers.train.offload import STATE_PARTS, unique_storages

        model = self.backend().model
        return {part: sum(one.nbytes() for one in unique_storages(model.state(part))) for part in STATE_PARTS}

    def _boxes(self, tensor_of: Any) -> list[tuple[str, Box, Any]]:
        from dagrl.refit.sources import held_boxes, local_of
        from dagrl.workers.fsdp.backend import FsdpBackend

        backend = self.backend()
        assert isinstance(backend, FsdpBackend)
        found = []
        for name, parameter in backend.model.parameters.items():
            part = tensor_of(parameter)
            if part is not None:
                for box, at in held_boxes(name, parameter):
                    values = local_of(part.detach())[tuple(slice(*run) for run in at)]
                    found.append((name, box, values.float().cpu().clone().numpy()))
        return found


class TestedValueWorker(FsdpValueWorker):
    __test__ = False


class TestedTeacherWorker(FsdpTeacherWorker):
    __test__ = False


KINDS = {"fsdp": TestedWorker, "fsdp value": TestedValueWorker, "fsdp teacher": TestedTeacherWorker}
