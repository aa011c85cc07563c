"""What is wrong with a run, found in the records that its ranks left (``hap.runtime.record``).

The rules are those of C4D (arXiv 2406.04594; four syndromes, told apart by who has entered which collective and who
waits for whom) with one premise taken out: in a cluster of unequal devices a rank is not slow because others are
faster. What a rank does is put beside what its plan says it should do, and beside what it did before.
"""
