"""Does a draft head fit its target, and if not, which setting of it is wrong?

    acceptance    how many draft tokens the target accepts, from one pass of a head over kept answers
    variants      the same head with one setting changed
    published     the lines of the published file that say a setting
    verdict       the search for the setting that fits best

A head is examined on greedy answers of the target, whose hidden states are kept. So a variant costs one pass of the
head, and no decoding.
"""
