"""The shared KV cache: slots, prefix cache blocks and their events."""
