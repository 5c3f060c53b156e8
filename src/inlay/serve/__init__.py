"""Serving: what leaves the process. HTTP for people, KV-cache events for routers."""
