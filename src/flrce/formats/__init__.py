"""Language models as files: GGUF, safetensors with a config.json, byte-level BPE."""
