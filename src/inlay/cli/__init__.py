"""The command-line interface: parses arguments, calls the library and prints results."""
