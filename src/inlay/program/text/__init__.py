"""Programs as text: printer, parser, folded form, structural diff."""
