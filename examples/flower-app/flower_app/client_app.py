"""The client: does whatever task the recipe gives it, with this node's own samples."""

from flower_app.task import load
from flrce.flower import client_app

app = client_app(load)
