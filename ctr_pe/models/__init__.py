"""What all backbones share: field groups, embeddings, the model, candidates, next-item losses."""
