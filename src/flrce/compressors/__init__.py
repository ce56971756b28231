"""What travels?"""
