"""The KV cache of many users: blocks that are found again, and events about them."""
