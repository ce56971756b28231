"""What may be wrong with bytes from the other side."""


class MalformedPayload(ValueError):
    """A payload that is not what its task asked for."""


CLIENT_MIGRATION = (
    "the app has clients of Flower's older interface (NumPyClient or client_fn), and flrce needs"
    " the Message API: write app = ClientApp() with functions under @app.train() and"
    " @app.evaluate(), as in docs/flower.md#from-the-older-interface"
)
