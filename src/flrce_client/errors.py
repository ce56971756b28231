"""What may be wrong with bytes from the other side."""


class MalformedPayload(ValueError):
    """A payload that is not what its task asked for."""
