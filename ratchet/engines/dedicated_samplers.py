"""Samplers on GPUs of their own, each in a process of its own, that work as one: `Sampler` to whoever asks.

Requests are dealt out in equal parts, and answers come back in order; weights are broadcast from where they were
trained. Trap: a process that ends may leave the others waiting for it in a broadcast, so that whoever is waited for is
watched, and the first failure closes all.
"""

import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any

import torch

from ratchet.data.packing import even_runs
from ratchet.engines.broadcast import Packed, WeightGroup, rendezvous
from ratchet.engines.model import torch_device
from ratchet.engines.sampler import Completion, SampleRequest, SamplingParams
from ratchet.engines.sampler_process import ADDRESS, KEY, Failure, Meeting, Start
from ratchet.errors import ConfigError, EngineError

_START_SECONDS = 600.0
"""For a process to connect; an engine compiles for minutes after that."""
_POLL_SECONDS = 1.0
_HOST = "127.0.0.1"
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_SAME_NATS = 0.05
"""Mean difference of log-probs that two engines with the same weights may have."""


class DedicatedSamplers:
    """Several samplers as one; see `ratchet.engines.sampler.Sampler`."""

    def __init__(
        self,
        name: str,
        model_folder: Path,
        *,
        count: int,
        first_gpu: int,
        settings: dict[str, Any],
    ) -> None:
        """Start `count` processes, each with a sampler `name` ("hf" or "vllm") over `model_folder`.

        On GPUs they take those from `first_gpu` on, counted among those that this process sees; weights are sent from
        this process's own. Raises ConfigError where there are too few GPUs, EngineError where one does not start.
        """
        device = torch_device(settings.get("device", "auto"))
        gpus = _gpus(count, first_gpu) if device.type == "cuda" else [None] * count
        self._store = rendezvous(_HOST, 0, count + 1, is_server=True)
        self._device = device
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            self._connect(gpus)
            self._call("start", [(Start(name, model_folder, settings, device.type),)] * count)
            # Once the engines are there: to start one may take longer than a group waits.
            places = [(Meeting(_HOST, self._store.port, rank, count + 1),) for rank in range(1, count + 1)]
            self._call("meet", places, meanwhile=self._meet)
        except BaseException:
            self.close()
            raise

    def sample(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[Completion]:
        """Draw one completion for each request, in their order; see `Sampler.sample`."""
        # Neighbours share a prompt, and so what is cached of it.
        parts = even_runs(requests, max(len(self._connections), 1))
        answers = self._call("sample", [(part, params) for part in parts])
        return [completion for answer in answers for completion in answer]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Replace the weights of all; see `Sampler.load_weights`."""
        given = {name: tensor.detach() for name, tensor in weights}
        packed = Packed.of(given)
        self._call(
            "load_weights",
            [(packed,)] * len(self._connections),
            meanwhile=lambda: self._group.send(given, packed, check=self._check_all_alive),
        )

    def fingerprint(self) -> int | None:
        """The number that all of them give, None where one cannot say. Raises EngineError where they differ."""
        found = self._call("fingerprint", [()] * len(self._connections))
        if None in found:
            return None
        if len(set(found)) > 1:
            raise EngineError(f"the samplers hold different weights: {', '.join(f'{one:x}' for one in found)}")
        return int(found[0])

    def prompt_log_probs(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probs of `token_ids[1:]`, which all of them must agree on; see `Sampler.prompt_log_probs`."""
        first, *others = self._call("prompt_log_probs", [(list(token_ids),)] * len(self._connections))
        for index, other in enumerate(others, start=1):
            difference = sum(abs(one - two) for one, two in zip(first, other, strict=True)) / max(len(first), 1)
            if not difference <= _SAME_NATS:
                raise EngineError(f"samplers 0 and {index} differ by {difference:.3g} nats a token on one prompt")
        return [float(value) for value in first]

    def sleep(self) -> None:
        """Their GPUs are their own: there is nobody to give memory to."""

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._connections, self._processes = [], []

    def _meet(self) -> None:
        """Make the group with the others."""
        self._group = WeightGroup(self._store, 0, len(self._connections) + 1, self._device)

    def _connect(self, gpus: Sequence[str | None]) -> None:
        """Start a process for each GPU and wait until all have connected."""
        key = secrets.token_bytes(32)
        with tempfile.TemporaryDirectory(prefix="ratchet-samplers-") as folder, ExitStack() as stack:
            listeners = []
            for index, gpu in enumerate(gpus):
                address = f"{folder}/{index}"
                listeners.append(stack.enter_context(Listener(address, family="AF_UNIX", authkey=key)))
                environment = {**os.environ, ADDRESS: address, KEY: key.hex()}
                # Launchers' variables are of another group.
                for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                    environment.pop(name, None)
                if gpu is not None:
                    environment[_VISIBLE] = gpu
                command = [sys.executable, "-m", "ratchet.engines.sampler_process"]
                self._processes.append(subprocess.Popen(command, env=environment))
            for index, listener in enumerate(listeners):
                self._connections.append(self._accept(listener, index))

    def _accept(self, listener: Listener, index: int) -> Connection:
        deadline = time.monotonic() + _START_SECONDS
        # What a listener waits on is its socket, which it keeps to itself.
        waiting: Any = listener._listener._socket  # type: ignore[attr-defined]
        while not wait([waiting], timeout=_POLL_SECONDS):
            self._check_alive(index)
            if time.monotonic() > deadline:
                raise EngineError(f"sampler process {index} did not connect within {_START_SECONDS:.0f} s")
        return listener.accept()

    def _call(
        self, method: str, arguments: Sequence[tuple[Any, ...]], *, meanwhile: Callable[[], Any] | None = None
    ) -> list[Any]:
        """Call `method` of every process with its own arguments, do `meanwhile`, and return what they answered."""
        if not self._connections:
            raise EngineError("the samplers are closed")
        try:
            for connection, given in zip(self._connections, arguments, strict=True):
                connection.send((method, given))
            if meanwhile is not None:
                meanwhile()
            return [self._answer(index, method) for index in range(len(self._connections))]
        except BaseException as error:
            # The others may be at something that is of no use any more.
            self._kill()
            if isinstance(error, ConnectionError):
                raise EngineError(f"a sampler process has ended before {method}") from error
            raise

    def _answer(self, index: int, method: str) -> Any:
        try:
            answer = self._connections[index].recv()
        except (EOFError, ConnectionResetError):
            self._processes[index].wait(timeout=30)
            self._check_alive(index)
            raise EngineError(f"sampler process {index} hung up during {method}") from None
        if isinstance(answer, Failure):
            where = "" if answer.is_known else f"sampler process {index}, {method}: "
            raise EngineError(f"{where}{answer.message}")
        return answer

    def _check_alive(self, index: int) -> None:
        code = self._processes[index].poll()
        if code is not None:
            raise EngineError(f"sampler process {index} ended with code {code}; its log is in this process's output")

    def _check_all_alive(self) -> None:
        for index in range(len(self._processes)):
            self._check_alive(index)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self.close()


def _gpus(count: int, first: int) -> list[str]:
    """The GPUs from `first` on, by the names that CUDA_VISIBLE_DEVICES has for them."""
    stated = os.environ.get(_VISIBLE)
    visible = stated.split(",") if stated else [str(index) for index in range(torch.cuda.device_count())]
    if first + count > len(visible):
        raise ConfigError(
            f"actor_rollout_ref.rollout.dedicated_gpus is {count} beside {first} that train: expected {first + count} "
            f"GPUs, and this process sees {len(visible)}"
        )
    return visible[first : first + count]
