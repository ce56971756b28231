"""What the server sends: quantised models, differences to what each client holds."""
