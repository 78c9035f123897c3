"""The stock ServerApp, which also notes when each round ended."""

import time
from collections.abc import Iterable
from typing import Any

from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from stock_app.task import make_network

app = ServerApp()


class Timed(FedAvg):
    times = ""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Any:
        result = super().aggregate_train(server_round, replies)
        with open(self.times, "a", encoding="utf-8") as file:
            file.write(f"{time.time()}\n")
        return result


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    nodes = int(config["nodes"])
    strategy = Timed(fraction_evaluate=0.0, min_train_nodes=nodes, min_evaluate_nodes=nodes, min_available_nodes=nodes)
    strategy.times = str(config["times"])
    arrays = ArrayRecord(make_network(str(config["hidden"])).state_dict())
    with open(strategy.times, "w", encoding="utf-8") as file:
        file.write(f"{time.time()}\n")
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=int(config["rounds"]))
