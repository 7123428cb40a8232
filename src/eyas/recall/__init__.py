"""Memory over requests: texts of earlier requests, from which later ones are drafted.

    pool = Pool(max_bytes=64 * 2**20)
    llm.generate(prompt, features=[Recalled(pool)])        drafts from the pool, and adds the answer to it
    pool.add(tokens)                                       a text that was not generated, such as a document

Agents repeat their last turn, and edits repeat the file. Answers over the same documents quote the same
sentences, and samples of one prompt resemble each other (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).
Drafts from the pool are verified like all others, so a text is the same with every pool.

A fast answer reveals texts of the pool, so requests of different owners must not share one: `Pools` keeps one
for each owner.
"""

from eyas.recall.feature import Pool, Pools, Recalled

__all__ = ["Pool", "Pools", "Recalled"]
