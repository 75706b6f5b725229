"""What users call: plan(), Plan, spmm(), linear layers, plan files, explanations."""
