import numpy as np
from flwr.app import Array, ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    """A step towards a place of the node's own: 1, 2 or 3 in every coordinate."""
    w = message.content["arrays"]["w"].numpy()
    near = (w + 0.5 * (1 + context.node_config["partition-id"] - w)).astype(np.float32)
    content = {
        "arrays": ArrayRecord({"w": Array(near)}),
        "metrics": MetricRecord({"num-examples": 10}),
    }
    return Message(RecordDict(content), reply_to=message)
