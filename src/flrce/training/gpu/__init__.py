"""Many clients' local training at once on one device."""
