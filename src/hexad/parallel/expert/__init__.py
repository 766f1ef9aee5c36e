"""Expert parallel: which rows reach which experts, on which ranks, and the products of experts."""
