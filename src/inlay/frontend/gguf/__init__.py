"""GGUF files: a strict reader, and the conversion of names and rows through transformers."""
