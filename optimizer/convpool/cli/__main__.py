from convpool.cli.optimize import main

if __name__ == "__main__":
    main()
