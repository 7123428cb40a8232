"""Published formats of the heads of `eyas_lab.methods`. One file is one format."""
