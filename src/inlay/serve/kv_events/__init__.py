"""KV events for routers: wire formats, publisher, subscriber."""
