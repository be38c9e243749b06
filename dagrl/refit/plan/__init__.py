"""Planning: which rank sends which part of a parameter to whom, in which bucket and in which round."""
