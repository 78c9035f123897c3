"""What methods share that know a model's head by its sizes and take what it answers for the model's answer."""

from dataclasses import dataclass

from bespokefl.core.algorithm import Algorithm, Setup
from bespokefl.core.task import Answer, Task
from bespokefl.errors import InputError


@dataclass(frozen=True)
class Headed(Algorithm):
    """Refuses a head that is not the model's end."""

    def check(self, task: Task, setup: Setup) -> None:
        super().check(task, setup)
        task.head_sizes(self.name)

    def check_answer(self, task: Task, answer: Answer) -> None:
        super().check_answer(task, answer)
        sizes = task.head_sizes(self.name)
        if not answer.from_head or sizes.classes != max(2, answer.outputs):
            raise InputError(
                f"model.head = {task.head_name!r} (layers of {sizes.outputs} outputs) does not give the model's answer "
                f"({answer.outputs} outputs), which algorithm.name = {self.name!r} takes it for; name the model's last "
                f"layer, one of {', '.join(layer.name for layer in task.layers)}"
            )
