"""`lockstep bisect`: the first input and the first tensor that differ, or the smallest input that crashes."""
