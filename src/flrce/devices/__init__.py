"""What devices spend: profiles, modelled and measured costs."""
