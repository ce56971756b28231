"""The client: does whatever task the recipe gives it, with this node's own samples."""

from flrce.flower import client_app

from flower_app.task import load

app = client_app(load)
