// Call the functions of a library for another process: calls come from standard input, results go to
// standard output, and the arguments lie in a file that both map into memory.
//
//     emulated_arm LIBRARY FILE
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <utility>

struct Call {
    char name[40];
    int64_t words[16];  // integers and addresses
    float number;
};

// ARM passes the float in a register of its own, wherever it stands, and a function that takes
// fewer words does not see the others.
template <size_t... I>
static int64_t run(void* function, const Call& call, std::index_sequence<I...>) {
    return ((int64_t(*)(float, decltype(int64_t(I))...))function)(call.number, call.words[I]...);
}

static void answer(int64_t result) {
    if (write(1, &result, sizeof result) != sizeof result) _exit(1);
}

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    const int file = open(arguments[2], O_RDWR);
    struct stat status;
    if (!library || fstat(file, &status)) return fprintf(stderr, "%s\n", dlerror()), 1;
    void* memory = mmap(nullptr, status.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    answer((int64_t)memory);
    for (Call call; read(0, &call, sizeof call) == sizeof call;) {
        void* function = dlsym(library, call.name);
        if (!function) return fprintf(stderr, "%s\n", dlerror()), 1;
        answer(run(function, call, std::make_index_sequence<16>{}));
    }
}
