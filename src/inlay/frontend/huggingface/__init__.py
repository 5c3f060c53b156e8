"""Hugging Face models: folders, ids and GGUF files through transformers."""
