"""Serving over the network: the HTTP API for clients and KV events for routers."""
