"""The weights, the tokenizer and the draft heads of the model that `eyas.tiny` loads; README.md in
weights/ says how they were made."""
