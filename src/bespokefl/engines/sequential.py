"""The readable reference: one client after another, plain PyTorch, nothing traced, stacked or padded."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bespokefl.core import trees
from bespokefl.core.program import Result, Rows
from bespokefl.core.task import Batch
from bespokefl.core.trees import Tree
from bespokefl.engines.base import Job, as_tensors, numerics, total_samples


class Sequential:
    """Runs a program client by client; a client whose program raises is left out and reported."""

    name = "sequential"
    left_out: tuple[type[Exception], ...] = (Exception,)  # what a client may raise without ending the run

    def __init__(self, device: torch.device | str = "cpu", *, tf32: bool = True) -> None:
        self.device, self.tf32 = torch.device(device), tf32

    def run(self, job: Job) -> Result:
        plans = job.plans()
        done, finished, failed = [], [], dict[int, BaseException]()
        with numerics(job.task.dtype, self.device, tf32=self.tf32), torch.device(self.device):
            for r, client in enumerate(job.clients):
                try:
                    finished.append(self._client(job, r, [phase[r] for phase in plans]))
                    done.append(r)
                except self.left_out as error:
                    failed[int(client)] = error
        samples = total_samples([[phase[r] for r in done] for phase in plans])
        uploads, states = trees.stack(finished) if finished else ({}, {})
        return Result(np.array(done, dtype=np.int64), uploads, states, failed, samples, samples)

    def _client(self, job: Job, r: int, plans: list[list[Rows]]) -> tuple[dict[str, Tree], Tree]:
        task, program = job.task, job.program
        down = SimpleNamespace(**job.shared, **trees.rows(dict(job.per_client), r))
        carry = self._stage(job, r, "begin", program.begin, task, down, trees.rows(job.states, r))
        for f, (phase, batches) in enumerate(zip(program.phases, plans, strict=True)):
            if phase.enter is not None:
                carry = self._stage(job, r, f"phase {f + 1}, enter", phase.enter, task, down, carry)
            keys = job.keys(np.array([r]), f, len(batches))
            for k, rows in enumerate(batches):
                x, y = job.data.gather(torch.as_tensor(rows, device=self.device))
                batch = Batch(x, y, None, torch.as_tensor(keys[k, 0], device=self.device))
                carry = self._stage(job, r, f"phase {f + 1}, step {k + 1}", phase.step, task, down, carry, batch)
        answer: tuple[dict[str, Tree], Tree] = self._stage(job, r, "finish", program.finish, task, down, carry)
        return answer

    def _stage(self, job: Job, r: int, stage: str, function: Callable[..., Tree], *values: Any) -> Tree:
        """What a function of the program answers for one client, numbers as tensors."""
        return as_tensors(function(*values), job.task.dtype, self.device)

    def plan(self) -> dict[str, Any]:
        return {}

    def load_state(self, plan: Mapping[str, Any]) -> None:
        """Nothing to take over."""

    def release(self) -> None:
        """It keeps nothing."""
