"""The stock ClientApp."""

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from stock_app.task import load, make_network, train

app = ClientApp()


@app.train()
def fit(message: Message, context: Context) -> Message:
    config = context.run_config
    network = make_network(str(config["hidden"]))
    network.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = load(int(context.node_config["partition-id"]), int(config["samples"]))
    train(network, x, y, int(config["epochs"]), int(config["batch"]))
    content = {"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord({"num-examples": len(x)})}
    return Message(RecordDict(content), reply_to=message)
