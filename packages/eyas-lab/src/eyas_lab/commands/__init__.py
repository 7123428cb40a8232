"""Commands of `eyas`. One file is one command."""
