"""What tests share: small logs, references, a pretended accelerator."""
