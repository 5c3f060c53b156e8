"""Views over what transforms did: why not, what next, whose fault."""
