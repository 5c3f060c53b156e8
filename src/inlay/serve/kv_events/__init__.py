"""KV-cache events for routers: wire formats, publisher, subscriber."""
