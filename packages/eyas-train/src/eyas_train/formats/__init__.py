"""Formats of heads that are written for other engines and that eyas does not read. One file is one format."""
