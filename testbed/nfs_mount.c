/*
 * nfs_mount: an NFS 3 export as a folder, through FUSE and libnfs, for nodes whose kernel has no NFS client.
 *
 *     nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS
 *
 * PATIENCE_MS: after so long without an answer a call fails with EIO; 0: never, as with the mount option "hard".
 * FLAGS: what the kernel is told of the mount, such as "ro,nosuid".
 *
 * One loop takes what FUSE's kernel side asks, and makes one call of NFS of it, as a rule. Any number of calls wait for
 * the server side by side. When the connection is lost, libnfs sends them again on the next one. Each has the uid and
 * gid of the process that caused it, or of the one that opened the file; the server decides. Of a process's further
 * groups the server learns nothing. A process that is killed while its server does not answer goes at once, as with the
 * kernel's client: its call is abandoned, and forgotten when it comes back.
 *
 * What the kernel is told, it keeps as long as its own client would, by the defaults of nfs(5): attributes and names of
 * files 3 s, of folders 30 s, twice as long each time they have not changed, up to 60 s. Names that are not there are
 * not kept, as with lookupcache=positive. A file is looked up again whenever it is opened. If it has changed, the
 * kernel is told to ask for its attributes before it uses what it knows. If another is there in its place, the answer
 * is ESTALE, upon which the kernel looks up all of the path anew and opens what is there. Data are kept until the
 * attributes change. Locks hold on this machine only. NFS 3, since opening a file with NFS 4 fails in libnfs 4.0.
 */
#define FUSE_USE_VERSION 312
#include <errno.h>
#include <fcntl.h>
#include <fuse_lowlevel.h>
#include <netinet/tcp.h>
#include <nfsc/libnfs.h>
#include <nfsc/libnfs-raw.h>
#include <nfsc/libnfs-raw-nfs.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/statvfs.h>
#include <time.h>

/* Fixed, so that the port mapper need not be asked and a firewall can know it. */
enum { MOUNT_PORT = 20048, NFS_PORT = 2049 };
/* How often a process that had a signal is asked whether it was killed, and others whether their patience is over. */
enum { LOOK_MS = 20 };
enum { RETRY_MS = 200 }; /* between two attempts to connect */
/* A server that has lost its power says nothing. TCP would wait for many minutes; after so long it connects anew. */
enum { UNHEARD_MS = 15000, IDLE_SECONDS = 5 };
/* A name that a thread has looked up so short ago is not looked up again when it opens it: one call did both. */
enum { SAME_CALL_US = 1000 };
enum { KEPT_FILE_SECONDS = 3, KEPT_FOLDER_SECONDS = 30, KEPT_MOST_SECONDS = 60 };
enum { MOST_DATA = 1 << 20 /* bytes of a file in one call */, TABLE_SIZE = 1 << 16 };

/* libnfs 4.0 has these, and does not declare them. */
struct nfs_fh { int len; char *val; };
const struct nfs_fh *nfs_get_rootfh(struct nfs_context *nfs);

struct handle {
    uint32_t size;
    char bytes[NFS3_FHSIZE];
};

/* What FUSE calls an inode, and NFS a handle: a file of which the kernel knows. */
struct node {
    struct handle handle;
    struct node *next;      /* in its chain of the table */
    uint64_t lookups;       /* how often the kernel was told of it and has not forgotten it */
    uint32_t calls;         /* in flight */
    struct stat attributes; /* as the kernel was told */
    int64_t told_us;
    int kept_seconds;
    struct handle folder; /* where it was found last */
    char *name;
    pid_t finder;
    pid_t sent_back; /* who had to look it up again when he opened it last */
    /* The last answer about what a user may do with it, for as long as its attributes stay. */
    bool has_access;
    uid_t access_uid;
    gid_t access_gid;
    uint32_t access;
};

/* All of a folder as FUSE wants it, read when a process begins to read it. An entry has the offset of the next. */
struct listing {
    char *data;
    size_t size;
};

struct call;
typedef void step_t(struct call *call, const void *reply);

struct call {
    fuse_req_t request; /* NULL: the process was killed, or its patience is over; nobody waits */
    pid_t pid;
    uid_t uid;
    gid_t gid;
    int64_t begun_us;
    bool is_interrupted;
    struct node *node;
    step_t *step; /* what to do with the reply; NULL while that is done, unless the call goes to the server again */
    struct fuse_file_info file;
    bool makes_open_file;
    struct handle target;
    char *name;
    size_t size;
    struct listing listing;
    struct call *next;
};

static struct rpc_context *rpc;
static struct fuse_session *session;
static int64_t patience_us;
static struct node root;
static struct node *table[TABLE_SIZE];
static struct call *calls;

static int64_t now_us(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000LL + now.tv_nsec / 1000;
}

/* A failed allocation ends the mount: nobody could be told of it. */
static void *checked(void *memory)
{
    if (memory == NULL)
        abort();
    return memory;
}

/* Files. */

static struct node **place_of(const struct handle *handle)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (uint32_t i = 0; i < handle->size; i++)
        hash = (hash ^ (unsigned char)handle->bytes[i]) * 1099511628211u;
    struct node **place = &table[(hash ^ hash >> 32) % TABLE_SIZE];
    while (*place != NULL && memcmp(&(*place)->handle, handle, sizeof *handle) != 0)
        place = &(*place)->next;
    return place;
}

static struct node *node_of(fuse_ino_t inode)
{
    return inode == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)inode;
}

static fuse_ino_t inode_of(const struct node *node)
{
    return node == &root ? FUSE_ROOT_ID : (fuse_ino_t)(uintptr_t)node;
}

static void free_unused(struct node *node)
{
    if (node == &root || node->lookups > 0 || node->calls > 0)
        return;
    *place_of(&node->handle) = node->next;
    free(node->name);
    free(node);
}

static bool has_changed(const struct stat *before, const struct stat *now)
{
    return before->st_size != now->st_size || before->st_mode != now->st_mode ||
           memcmp(&before->st_mtim, &now->st_mtim, sizeof now->st_mtim) != 0 ||
           memcmp(&before->st_ctim, &now->st_ctim, sizeof now->st_ctim) != 0;
}

/* Note what the kernel is about to be told of a file. Returns for how many seconds it may keep that. */
static int tell(struct node *node, const struct stat *now)
{
    if (node->kept_seconds == 0 || has_changed(&node->attributes, now)) {
        node->kept_seconds = S_ISDIR(now->st_mode) ? KEPT_FOLDER_SECONDS : KEPT_FILE_SECONDS;
        node->has_access = false;
    } else if (now_us() - node->told_us >= node->kept_seconds * 1000000LL) {
        node->kept_seconds = 2 * node->kept_seconds < KEPT_MOST_SECONDS ? 2 * node->kept_seconds : KEPT_MOST_SECONDS;
    }
    node->told_us = now_us();
    node->attributes = *now;
    return node->kept_seconds;
}

/* Between NFS and C. */

static nfs_fh3 to_nfs(const struct handle *handle)
{
    return (nfs_fh3){.data = {handle->size, (char *)handle->bytes}};
}

static struct handle to_handle(const nfs_fh3 *from)
{
    struct handle handle = {.size = from->data.data_len};
    if (handle.size > NFS3_FHSIZE)
        abort();
    memcpy(handle.bytes, from->data.data_val, handle.size);
    return handle;
}

static struct stat to_stat(const fattr3 *from)
{
    static const mode_t types[] = {0, S_IFREG, S_IFDIR, S_IFBLK, S_IFCHR, S_IFLNK, S_IFSOCK, S_IFIFO};
    return (struct stat){
        .st_mode = types[from->type & 7] | (from->mode & 07777),
        .st_ino = from->fileid,
        .st_nlink = from->nlink,
        .st_uid = from->uid,
        .st_gid = from->gid,
        .st_size = (off_t)from->size,
        .st_blocks = (blkcnt_t)((from->used + 511) / 512),
        .st_blksize = MOST_DATA, /* as with the kernel's client: programs write in pieces of this size */
        .st_atim = {from->atime.seconds, from->atime.nseconds},
        .st_mtim = {from->mtime.seconds, from->mtime.nseconds},
        .st_ctim = {from->ctime.seconds, from->ctime.nseconds},
    };
}

/* Attributes that may be left out; then the mode is 0. */
static struct stat to_optional_stat(const post_op_attr *from)
{
    return from->attributes_follow ? to_stat(&from->post_op_attr_u.attributes) : (struct stat){0};
}

/* What SETATTR and the calls that make something set. `valid`: FUSE_SET_ATTR_... */
static sattr3 to_new_attributes(const struct stat *new, int valid)
{
    const bool accessed = valid & FUSE_SET_ATTR_ATIME, modified = valid & FUSE_SET_ATTR_MTIME;
    return (sattr3){
        .mode = {(valid & FUSE_SET_ATTR_MODE) != 0, {new->st_mode & 07777}},
        .uid = {(valid & FUSE_SET_ATTR_UID) != 0, {new->st_uid}},
        .gid = {(valid & FUSE_SET_ATTR_GID) != 0, {new->st_gid}},
        .size = {(valid & FUSE_SET_ATTR_SIZE) != 0, {(size3)new->st_size}},
        .atime = {!accessed ? DONT_CHANGE : valid & FUSE_SET_ATTR_ATIME_NOW ? SET_TO_SERVER_TIME : SET_TO_CLIENT_TIME,
                  {{(u_int)new->st_atim.tv_sec, (u_int)new->st_atim.tv_nsec}}},
        .mtime = {!modified ? DONT_CHANGE : valid & FUSE_SET_ATTR_MTIME_NOW ? SET_TO_SERVER_TIME : SET_TO_CLIENT_TIME,
                  {{(u_int)new->st_mtim.tv_sec, (u_int)new->st_mtim.tv_nsec}}},
    };
}

/* Calls. */

/* The signals in one line of /proc/PID/status. */
static unsigned long long signals(const char *status, const char *name)
{
    const char *line = strstr(status, name);
    return line == NULL ? 0 : strtoull(line + strlen(name), NULL, 16);
}

/* Whether a process is about to end by a signal. FUSE tells of every one; the kernel's client stops for these only. */
static bool is_killed(pid_t pid)
{
    const unsigned long long harmless =
        1ull << (SIGCHLD - 1) | 1ull << (SIGCONT - 1) | 1ull << (SIGURG - 1) | 1ull << (SIGWINCH - 1);
    char text[4096];

    snprintf(text, sizeof text, "/proc/%d/status", (int)pid);
    FILE *file = fopen(text, "r");
    if (file == NULL)
        return true;
    text[fread(text, 1, sizeof text - 1, file)] = '\0';
    fclose(file);
    const unsigned long long pending = signals(text, "\nSigPnd:") | signals(text, "\nShdPnd:");
    const unsigned long long withheld =
        signals(text, "\nSigBlk:") | signals(text, "\nSigIgn:") | signals(text, "\nSigCgt:");
    return (pending & ~withheld & ~harmless) != 0;
}

static void note_interrupt(fuse_req_t request, void *call)
{
    ((struct call *)call)->is_interrupted = true;
}

/* Answer calls whose process was killed, or whose patience is over. Returns in how many ms to look again; -1: never. */
static int abandon(void)
{
    int look_ms = -1;
    for (struct call *call = calls; call != NULL; call = call->next) {
        if (call->request == NULL)
            continue;
        const bool is_over = patience_us > 0 && now_us() - call->begun_us > patience_us;
        if (is_over || (call->is_interrupted && is_killed(call->pid))) {
            fuse_reply_err(call->request, is_over ? EIO : EINTR);
            call->request = NULL;
        } else if (call->is_interrupted || patience_us > 0) {
            look_ms = LOOK_MS;
        }
    }
    return look_ms;
}

static void act_as(uid_t uid, gid_t gid)
{
    rpc_set_uid(rpc, (int)uid);
    rpc_set_gid(rpc, (int)gid);
}

/* Begin the work for a request of FUSE about a file, or about a name in a folder. */
static struct call *begin(fuse_req_t request, fuse_ino_t inode, const char *name)
{
    const struct fuse_ctx *who = fuse_req_ctx(request);
    struct call *call = checked(calloc(1, sizeof *call));
    *call = (struct call){.request = request, .pid = who->pid, .uid = who->uid, .gid = who->gid, .next = calls};
    call->begun_us = now_us();
    call->node = node_of(inode);
    call->node->calls++;
    if (name != NULL)
        call->name = checked(strdup(name));
    calls = call;
    fuse_req_interrupt_func(request, note_interrupt, call);
    act_as(call->uid, call->gid);
    return call;
}

/* The same for an open file: in the name of who opened it. */
static struct call *begin_open(fuse_req_t request, fuse_ino_t inode, const struct fuse_file_info *file)
{
    struct call *call = begin(request, inode, NULL);
    if (file != NULL) {
        call->uid = (uid_t)(file->fh >> 32);
        call->gid = (gid_t)file->fh;
        act_as(call->uid, call->gid);
    }
    return call;
}

static void set_opener(struct call *call, const struct fuse_file_info *file)
{
    call->file = *file;
    call->file.fh = (uint64_t)call->uid << 32 | call->gid;
    call->file.keep_cache = 1; /* data go when the kernel is told of other attributes */
}

static nfs_fh3 handle_of(const struct call *call)
{
    return to_nfs(&call->node->handle);
}

static diropargs3 place_in(const struct call *call)
{
    return (diropargs3){handle_of(call), call->name};
}

static void end(struct call *call)
{
    struct call **place = &calls;
    while (*place != call)
        place = &(*place)->next;
    *place = call->next;
    call->node->calls--;
    free_unused(call->node);
    free(call->listing.data);
    free(call->name);
    free(call);
}

static step_t look_again; /* it has its own way with errors */

/* What libnfs calls when a reply is there. All replies begin with NFS's status. */
static void finish(struct rpc_context *unused, int status, void *reply, void *owner)
{
    struct call *call = owner;
    step_t *step = call->step;
    const int error = status != RPC_STATUS_SUCCESS ? EIO : -nfsstat3_to_errno(*(const int *)reply);

    call->step = NULL;
    act_as(call->uid, call->gid);
    if (call->request != NULL && error != 0 && step != look_again)
        fuse_reply_err(call->request, error);
    else if (call->request != NULL)
        step(call, error == 0 ? reply : NULL);
    if (call->step == NULL)
        end(call);
}

/* Note what is to be done with the reply to a call. `sent`: what libnfs returned for it. */
static void then(struct call *call, step_t *step, int sent)
{
    if (sent != 0)
        abort(); /* no memory */
    call->step = step;
}

/* What a reply has if its call succeeded. */
#define RESULT(TYPE, reply) (&((const TYPE *)(reply))->TYPE##_u.resok)

static void answer_done(struct call *call, const void *reply)
{
    fuse_reply_err(call->request, 0);
}

/* Attributes. */

static void answer_attributes(struct call *call, const void *reply)
{
    const struct stat now = to_stat(&RESULT(GETATTR3res, reply)->obj_attributes);
    fuse_reply_attr(call->request, &now, tell(call->node, &now));
}

static void ask_attributes(struct call *call, step_t *step)
{
    GETATTR3args args = {handle_of(call)};
    then(call, step, rpc_nfs3_getattr_async(rpc, finish, &args, call));
}

static void do_getattr(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    ask_attributes(begin(request, inode, NULL), answer_attributes);
}

static void answer_set(struct call *call, const void *reply)
{
    const struct stat now = to_optional_stat(&RESULT(SETATTR3res, reply)->obj_wcc.after);
    if (now.st_mode == 0)
        fuse_reply_err(call->request, EIO);
    else
        fuse_reply_attr(call->request, &now, tell(call->node, &now));
}

static void do_setattr(fuse_req_t request, fuse_ino_t inode, struct stat *new, int valid, struct fuse_file_info *file)
{
    struct call *call = begin_open(request, inode, file);
    SETATTR3args args = {.object = handle_of(call), .new_attributes = to_new_attributes(new, valid)};
    then(call, answer_set, rpc_nfs3_setattr_async(rpc, finish, &args, call));
}

static void answer_volume(struct call *call, const void *reply)
{
    const FSSTAT3resok *found = RESULT(FSSTAT3res, reply);
    const uint64_t block = 4096;
    const struct statvfs volume = {
        .f_bsize = block, .f_frsize = block, .f_namemax = 255,
        .f_blocks = found->tbytes / block, .f_bfree = found->fbytes / block, .f_bavail = found->abytes / block,
        .f_files = found->tfiles, .f_ffree = found->ffiles, .f_favail = found->afiles,
    };
    fuse_reply_statfs(call->request, &volume);
}

static void do_statfs(fuse_req_t request, fuse_ino_t inode)
{
    struct call *call = begin(request, inode, NULL);
    FSSTAT3args args = {handle_of(call)};
    then(call, answer_volume, rpc_nfs3_fsstat_async(rpc, finish, &args, call));
}

/* Names. */

/* Tell the kernel of a file under the call's name. */
static void answer_found(struct call *call, const struct handle *handle, const struct stat *now)
{
    if (handle->size == 0 || now->st_mode == 0) { /* gone between two looks of the server: the kernel is to ask again */
        fuse_reply_err(call->request, ESTALE);
        return;
    }
    struct node **place = place_of(handle), *node = *place;
    if (node == NULL) {
        node = *place = checked(calloc(1, sizeof *node));
        node->handle = *handle;
    }
    struct fuse_entry_param entry = {.ino = inode_of(node), .generation = 1, .attr = *now};
    entry.attr_timeout = entry.entry_timeout = tell(node, now);
    free(node->name);
    node->name = call->name;
    call->name = NULL;
    node->folder = call->node->handle;
    node->finder = call->pid;
    node->lookups++;
    if ((call->makes_open_file ? fuse_reply_create(call->request, &entry, &call->file)
                               : fuse_reply_entry(call->request, &entry)) != 0)
        node->lookups--;
    free_unused(node);
}

static void answer_lookup(struct call *call, const void *reply)
{
    const struct handle handle = to_handle(&RESULT(LOOKUP3res, reply)->object);
    const struct stat now = to_optional_stat(&RESULT(LOOKUP3res, reply)->obj_attributes);
    answer_found(call, &handle, &now);
}

/* After CREATE, MKDIR and SYMLINK, whose replies are alike. */
static void answer_made(struct call *call, const void *reply)
{
    const post_op_fh3 *made = &RESULT(CREATE3res, reply)->obj;
    const struct handle handle = made->handle_follows ? to_handle(&made->post_op_fh3_u.handle) : (struct handle){0};
    const struct stat now = to_optional_stat(&RESULT(CREATE3res, reply)->obj_attributes);
    answer_found(call, &handle, &now);
}

static void answer_link(struct call *call, const void *reply)
{
    const struct stat now = to_optional_stat(&RESULT(LINK3res, reply)->file_attributes);
    answer_found(call, &call->target, &now);
}

static void do_lookup(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    struct call *call = begin(request, folder, name);
    LOOKUP3args args = {place_in(call)};
    then(call, answer_lookup, rpc_nfs3_lookup_async(rpc, finish, &args, call));
}

static void do_forget(fuse_req_t request, fuse_ino_t inode, uint64_t count)
{
    node_of(inode)->lookups -= count;
    free_unused(node_of(inode));
    fuse_reply_none(request);
}

static void do_mkdir(fuse_req_t request, fuse_ino_t folder, const char *name, mode_t mode)
{
    struct call *call = begin(request, folder, name);
    MKDIR3args args = {place_in(call), to_new_attributes(&(struct stat){.st_mode = mode}, FUSE_SET_ATTR_MODE)};
    then(call, answer_made, rpc_nfs3_mkdir_async(rpc, finish, &args, call));
}

static void do_symlink(fuse_req_t request, const char *target, fuse_ino_t folder, const char *name)
{
    struct call *call = begin(request, folder, name);
    const sattr3 new = to_new_attributes(&(struct stat){.st_mode = 0777}, FUSE_SET_ATTR_MODE);
    SYMLINK3args args = {place_in(call), {new, (char *)target}};
    then(call, answer_made, rpc_nfs3_symlink_async(rpc, finish, &args, call));
}

static void do_create(fuse_req_t request, fuse_ino_t folder, const char *name, mode_t mode, struct fuse_file_info *file)
{
    struct call *call = begin(request, folder, name);
    const int valid = FUSE_SET_ATTR_MODE | (file->flags & O_TRUNC ? FUSE_SET_ATTR_SIZE : 0);
    CREATE3args args = {place_in(call), {.mode = file->flags & O_EXCL ? GUARDED : UNCHECKED}};
    args.how.createhow3_u.obj_attributes = to_new_attributes(&(struct stat){.st_mode = mode}, valid);
    call->makes_open_file = true;
    set_opener(call, file);
    then(call, answer_made, rpc_nfs3_create_async(rpc, finish, &args, call));
}

static void do_link(fuse_req_t request, fuse_ino_t inode, fuse_ino_t folder, const char *name)
{
    struct call *call = begin(request, folder, name);
    call->target = node_of(inode)->handle;
    LINK3args args = {to_nfs(&call->target), place_in(call)};
    then(call, answer_link, rpc_nfs3_link_async(rpc, finish, &args, call));
}

static void do_unlink(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    struct call *call = begin(request, folder, name);
    REMOVE3args args = {place_in(call)};
    then(call, answer_done, rpc_nfs3_remove_async(rpc, finish, &args, call));
}

static void do_rmdir(fuse_req_t request, fuse_ino_t folder, const char *name)
{
    struct call *call = begin(request, folder, name);
    RMDIR3args args = {place_in(call)};
    then(call, answer_done, rpc_nfs3_rmdir_async(rpc, finish, &args, call));
}

static void do_rename(fuse_req_t request, fuse_ino_t folder, const char *name, fuse_ino_t new_folder,
                      const char *new_name, unsigned int flags)
{
    if (flags != 0) { /* as the kernel's client */
        fuse_reply_err(request, EINVAL);
        return;
    }
    struct call *call = begin(request, folder, name);
    RENAME3args args = {place_in(call), {to_nfs(&node_of(new_folder)->handle), (char *)new_name}};
    then(call, answer_done, rpc_nfs3_rename_async(rpc, finish, &args, call));
}

static void answer_target(struct call *call, const void *reply)
{
    fuse_reply_readlink(call->request, RESULT(READLINK3res, reply)->data);
}

static void do_readlink(fuse_req_t request, fuse_ino_t inode)
{
    struct call *call = begin(request, inode, NULL);
    READLINK3args args = {handle_of(call)};
    then(call, answer_target, rpc_nfs3_readlink_async(rpc, finish, &args, call));
}

/* Open files. */

/* Whether bits of ACCESS are enough for the way in which a file is opened. */
static bool is_enough(const struct fuse_file_info *file, uint32_t granted)
{
    const int mode = file->flags & O_ACCMODE;
    return (mode == O_WRONLY || granted & (ACCESS3_READ | ACCESS3_EXECUTE)) &&
           (mode == O_RDONLY || granted & ACCESS3_MODIFY);
}

static step_t answer_access;

/*
 * The last step of opening: whether the user may. The mode tells where it grants by uid and gid alone, except for root,
 * whom the server may take for nobody. Else the server is asked.
 */
static void check_access(struct call *call)
{
    const struct node *node = call->node;
    const struct stat *now = &node->attributes;
    const bool is_known = node->has_access && node->access_uid == call->uid && node->access_gid == call->gid;
    const mode_t bits = now->st_mode >> (call->uid == now->st_uid ? 6 : call->gid == now->st_gid ? 3 : 0);
    uint32_t granted = (bits & 4 ? ACCESS3_READ : 0) | (bits & 2 ? ACCESS3_MODIFY : 0);

    if (is_known || call->uid == 0)
        granted = is_known ? node->access : 0;
    if (is_enough(&call->file, granted)) {
        fuse_reply_open(call->request, &call->file);
    } else if (is_known) {
        fuse_reply_err(call->request, EACCES);
    } else {
        ACCESS3args args = {handle_of(call), ACCESS3_READ | ACCESS3_MODIFY | ACCESS3_EXECUTE};
        then(call, answer_access, rpc_nfs3_access_async(rpc, finish, &args, call));
    }
}

static void answer_access(struct call *call, const void *reply)
{
    struct node *node = call->node;
    node->has_access = true;
    node->access = RESULT(ACCESS3res, reply)->access;
    node->access_uid = call->uid;
    node->access_gid = call->gid;
    check_access(call);
}

/* After a file that is opened was looked up again or, without a name, was asked for by its handle. */
static void look_again(struct call *call, const void *reply)
{
    struct node *node = call->node;
    const bool by_name = call->name != NULL;
    struct handle handle = node->handle;
    struct stat now = {0};
    if (reply != NULL && by_name) {
        handle = to_handle(&RESULT(LOOKUP3res, reply)->object);
        now = to_optional_stat(&RESULT(LOOKUP3res, reply)->obj_attributes);
    } else if (reply != NULL) {
        now = to_stat(&RESULT(GETATTR3res, reply)->obj_attributes);
    }
    bool is_stale = now.st_mode == 0 || memcmp(&handle, &node->handle, sizeof handle) != 0;
    if (!is_stale && has_changed(&node->attributes, &now)) {
        fuse_lowlevel_notify_inval_inode(session, inode_of(node), -1, 0);
        tell(node, &now);
        /* The kernel appends at the end that it knows. A file that grows all the time would send it back for ever. */
        is_stale = by_name && call->file.flags & O_APPEND && node->sent_back != call->pid;
    }
    node->sent_back = is_stale ? call->pid : 0;
    if (!is_stale) {
        check_access(call);
        return;
    }
    free(node->name); /* the kernel's next look gives it one again */
    node->name = NULL;
    fuse_reply_err(call->request, ESTALE);
}

static void do_open(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    struct node *node = node_of(inode);
    struct call *call = begin(request, inode, node->name);
    const bool is_fresh = node->finder == call->pid && now_us() - node->told_us < SAME_CALL_US;
    node->finder = 0;
    set_opener(call, file);
    if (is_fresh) {
        check_access(call);
        if (call->step == NULL)
            end(call);
    } else if (node->name != NULL) {
        LOOKUP3args args = {{to_nfs(&node->folder), call->name}};
        then(call, look_again, rpc_nfs3_lookup_async(rpc, finish, &args, call));
    } else {
        ask_attributes(call, look_again);
    }
}

static void answer_data(struct call *call, const void *reply)
{
    const READ3resok *found = RESULT(READ3res, reply);
    if (found->data.data_len < call->size && !found->eof) /* the kernel would take it for the end of the file */
        fuse_reply_err(call->request, EIO);
    else
        fuse_reply_buf(call->request, found->data.data_val, found->data.data_len);
}

static void do_read(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file)
{
    struct call *call = begin_open(request, inode, file);
    READ3args args = {handle_of(call), (offset3)offset, (count3)size};
    call->size = size;
    then(call, answer_data, rpc_nfs3_read_async(rpc, finish, &args, call));
}

static void answer_written(struct call *call, const void *reply)
{
    fuse_reply_write(call->request, RESULT(WRITE3res, reply)->count);
}

static void do_write(fuse_req_t request, fuse_ino_t inode, const char *data, size_t size, off_t offset,
                     struct fuse_file_info *file)
{
    struct call *call = begin_open(request, inode, file);
    WRITE3args args = {handle_of(call), (offset3)offset, (count3)size, UNSTABLE, {(u_int)size, (char *)data}};
    if (file->flags & (O_SYNC | O_DSYNC))
        args.stable = FILE_SYNC;
    then(call, answer_written, rpc_nfs3_write_async(rpc, finish, &args, call));
}

static void do_fsync(fuse_req_t request, fuse_ino_t inode, int only_data, struct fuse_file_info *file)
{
    struct call *call = begin_open(request, inode, file);
    COMMIT3args args = {.file = handle_of(call)}; /* all of it */
    then(call, answer_done, rpc_nfs3_commit_async(rpc, finish, &args, call));
}

/* Folders. */

static struct listing *listing_of(const struct fuse_file_info *file)
{
    return (struct listing *)(uintptr_t)file->fh;
}

static void do_opendir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    file->fh = (uintptr_t)checked(calloc(1, sizeof(struct listing)));
    if (fuse_reply_open(request, file) != 0)
        free(listing_of(file));
}

static void do_releasedir(fuse_req_t request, fuse_ino_t inode, struct fuse_file_info *file)
{
    free(listing_of(file)->data);
    free(listing_of(file));
    fuse_reply_err(request, 0);
}

/* Answer with as many entries as fit. */
static void answer_entries(fuse_req_t request, const struct listing *listing, size_t size, size_t from)
{
    size_t end = from;
    while (end + 2 * sizeof(uint64_t) <= listing->size) {
        uint64_t next;
        memcpy(&next, listing->data + end + sizeof next, sizeof next); /* fuse_dirent's `off` */
        if (next <= end || next - from > size) /* or the caller has made up an offset */
            break;
        end = next;
    }
    fuse_reply_buf(request, listing->data + from, end - from);
}

static step_t answer_listed;

static void ask_entries(struct call *call, cookie3 from, const char *verifier)
{
    READDIRPLUS3args args = {handle_of(call), from, {0}, MOST_DATA / 8, MOST_DATA / 2};
    memcpy(args.cookieverf, verifier, NFS3_COOKIEVERFSIZE);
    then(call, answer_listed, rpc_nfs3_readdirplus_async(rpc, finish, &args, call));
}

static void answer_listed(struct call *call, const void *reply)
{
    const READDIRPLUS3resok *found = RESULT(READDIRPLUS3res, reply);
    struct listing *listing = &call->listing;
    cookie3 last = 0;

    for (const entryplus3 *entry = found->reply.entries; entry != NULL; entry = entry->nextentry) {
        struct stat kind = to_optional_stat(&entry->name_attributes); /* so programs need not ask for each one's */
        const size_t next = listing->size + fuse_add_direntry(call->request, NULL, 0, entry->name, NULL, 0);
        kind.st_ino = entry->fileid;
        listing->data = checked(realloc(listing->data, next));
        fuse_add_direntry(call->request, listing->data + listing->size, next - listing->size, entry->name, &kind,
                          (off_t)next);
        listing->size = next;
        last = entry->cookie;
    }
    if (!found->reply.eof && found->reply.entries != NULL) {
        ask_entries(call, last, found->cookieverf);
        return;
    }
    struct listing *kept = listing_of(&call->file), old = *kept;
    *kept = *listing;
    *listing = old; /* freed with the call */
    answer_entries(call->request, kept, call->size, 0);
}

static void do_readdir(fuse_req_t request, fuse_ino_t inode, size_t size, off_t offset, struct fuse_file_info *file)
{
    static const cookieverf3 none;
    if (offset != 0) {
        answer_entries(request, listing_of(file), size, (size_t)offset);
        return;
    }
    struct call *call = begin(request, inode, NULL);
    call->file = *file;
    call->size = size;
    ask_entries(call, 0, none);
}

/* The mount. */

static void do_init(void *unused, struct fuse_conn_info *connection)
{
    connection->want &= ~(unsigned)FUSE_CAP_ATOMIC_O_TRUNC; /* a SETATTR follows instead */
    connection->want |= connection->capable & (FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_CACHE_SYMLINKS);
    connection->max_write = connection->max_read = MOST_DATA;
    connection->max_background = 64;
    connection->congestion_threshold = 48;
}

static const struct fuse_lowlevel_ops operations = {
    .init = do_init,       .lookup = do_lookup,     .forget = do_forget,         .getattr = do_getattr,
    .setattr = do_setattr, .readlink = do_readlink, .mkdir = do_mkdir,           .unlink = do_unlink,
    .rmdir = do_rmdir,     .symlink = do_symlink,   .rename = do_rename,         .link = do_link,
    .open = do_open,       .read = do_read,         .write = do_write,           .fsync = do_fsync,
    .opendir = do_opendir, .readdir = do_readdir,   .releasedir = do_releasedir, .statfs = do_statfs,
    .create = do_create,
};

static void set_up_connection(int fd)
{
    const int on = 1, idle_seconds = IDLE_SECONDS, unheard_ms = UNHEARD_MS;
    setsockopt(fd, SOL_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(fd, SOL_TCP, TCP_KEEPIDLE, &idle_seconds, sizeof idle_seconds);
    setsockopt(fd, SOL_TCP, TCP_KEEPINTVL, &idle_seconds, sizeof idle_seconds);
    setsockopt(fd, SOL_TCP, TCP_USER_TIMEOUT, &unheard_ms, sizeof unheard_ms);
}

/* Serve FUSE's kernel side, until it ends, and the server. */
static void serve(void)
{
    struct fuse_buf request = {0};
    bool is_set_up = false;
    int64_t retry_us = 0;

    while (!fuse_session_exited(session)) {
        struct pollfd both[2] = {{.fd = fuse_session_fd(session), .events = POLLIN}, {.fd = -1}};
        const int events = rpc_which_events(rpc); /* without POLLIN, there is no connection yet */
        int most_ms = abandon();
        if (events & POLLIN && !is_set_up)
            set_up_connection(rpc_get_fd(rpc));
        is_set_up = events & POLLIN;
        if (now_us() >= retry_us)
            both[1] = (struct pollfd){.fd = rpc_get_fd(rpc), .events = (short)events};
        else if (most_ms < 0)
            most_ms = RETRY_MS;
        if (poll(both, 2, most_ms) < 0)
            continue; /* a signal */
        if (both[1].revents & (POLLERR | POLLHUP))
            retry_us = now_us() + RETRY_MS * 1000;
        if (both[1].revents != 0 && rpc_service(rpc, both[1].revents) < 0)
            rpc_service(rpc, -1); /* connect anew */
        if (both[0].revents == 0)
            continue;
        const int size = fuse_session_receive_buf(session, &request);
        if (size > 0)
            fuse_session_process_buf(session, &request);
        else if (size != -EINTR && size != -EAGAIN)
            return;
    }
}

int main(int count, char **words)
{
    char text[4096];
    if (count != 6) {
        fprintf(stderr, "usage: nfs_mount SERVER EXPORT FOLDER PATIENCE_MS FLAGS\n");
        return 1;
    }
    const char *server = words[1], *export = words[2], *folder = words[3], *flags = words[5];
    const int patience_ms = atoi(words[4]);

    struct nfs_context *nfs = checked(nfs_init_context());
    snprintf(text, sizeof text, "nfs://%s%s?version=3&nfsport=%d&mountport=%d", server, export, NFS_PORT, MOUNT_PORT);
    const struct nfs_url *url = nfs_parse_url_dir(nfs, text);
    if (patience_ms > 0)
        nfs_set_timeout(nfs, patience_ms);
    if (url == NULL || nfs_mount(nfs, url->server, url->path) != 0) {
        fprintf(stderr, "mount.nfs: mounting %s:%s failed: %s\n", server, export, nfs_get_error(nfs));
        return 32; /* mount(8): mount failure */
    }
    /* From here on patience is abandon()'s: libnfs 4.0 may lose its queue when a call times out. */
    nfs_set_timeout(nfs, 0);
    patience_us = patience_ms * 1000LL;
    rpc = nfs_get_rpc_context(nfs);
    root.handle.size = (uint32_t)nfs_get_rootfh(nfs)->len;
    memcpy(root.handle.bytes, nfs_get_rootfh(nfs)->val, root.handle.size);
    *place_of(&root.handle) = &root;

    snprintf(text, sizeof text, "-oallow_other,default_permissions,subtype=nfs,fsname=%s:%s,max_read=%d%s%s", server,
             export, MOST_DATA, *flags ? "," : "", flags);
    char *arguments[] = {words[0], text, NULL};
    struct fuse_args options = FUSE_ARGS_INIT(2, arguments);
    session = fuse_session_new(&options, &operations, sizeof operations, NULL);
    if (session == NULL || fuse_set_signal_handlers(session) != 0 || fuse_session_mount(session, folder) != 0 ||
        /* A request that `poll` has shown may be gone: a call that has ended needs no interrupt any more. */
        fcntl(fuse_session_fd(session), F_SETFL, O_NONBLOCK) != 0 ||
        fuse_daemonize(0) != 0)
        return 32;
    serve();
    fuse_session_unmount(session);
    return 0;
}
