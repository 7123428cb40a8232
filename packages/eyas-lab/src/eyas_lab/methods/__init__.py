"""Methods that eyas is compared with. One file is one method; files that begin with an underscore are shared."""
