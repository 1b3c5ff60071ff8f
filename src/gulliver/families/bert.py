"""BERT: an encoder whose tokens see each other both ways."""

from __future__ import annotations

from gulliver.families.record import Blocks, Family, Sequences, Tensors

BERT = Family(
    "bert",
    tensors=Tensors(
        {
            "self.query": "column by heads",
            "self.key": "column by heads",
            "self.value": "column by heads",
            "attention.output.dense": "row by heads",
            "crossattention.output.dense": "row by heads",
            "intermediate.dense": "column",
            "output.dense": "row",
            "word_embeddings": "vocabulary",
            "position_embeddings": "replicate",
            "token_type_embeddings": "replicate",
            "pooler.dense": "replicate",
            "transform.dense": "replicate",
            "predictions.decoder": "head",
            "seq_relationship": "replicate",
            "classifier": "replicate",
            "qa_outputs": "replicate",
        }
    ),
    blocks=Blocks(),
    sequences=Sequences(
        exit="encoder",
        dropouts=("attention_probs_dropout_prob",),
        refused=("add_cross_attention",),
    ),
)
