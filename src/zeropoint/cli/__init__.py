"""The command line: parse, call, print. Whatever is decided or computed happens in the layers below."""
