"""PARD: a language model with a mask token drafts several tokens in one pass, for all models of its family.

method_pard.py has the method, its state of the rows, and the additions of PARD-2.
"""
