"""Replicas of the engine under Ray Serve, and routing by what they have cached. Needs the extra `cluster`."""
