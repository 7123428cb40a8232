"""Commands of `eyas`. One file is one command; files that begin with an underscore are shared."""
