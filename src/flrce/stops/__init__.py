"""Enough?"""
