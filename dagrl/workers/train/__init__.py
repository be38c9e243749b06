"""What every train worker does, whatever computes its model."""
