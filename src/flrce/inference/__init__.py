"""Using a trained model: prediction on raw samples, and export to other runtimes."""
